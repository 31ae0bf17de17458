"""RobustnessEvaluation run on a tiny classifier."""

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks.callbacks import RobustnessEvaluation
from tests.lightning_tasks.robustness.modules import TinyImages

QUICK = {"attacks": ["fgsm", {"name": "square", "queries": 5}], "eps": ["4/255", 0.1], "corruptions": []}


def trainer(folder, *callbacks, logger=None, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    loggers = CSVLogger(folder, name="demo") if logger is None else logger
    return pl.Trainer(default_root_dir=folder, logger=loggers, callbacks=[*callbacks], **{**quiet, **options})


def evaluate(folder, module, data=None, logger=None, **options):
    callback = RobustnessEvaluation(**{**QUICK, **options})
    trainer(folder, callback, logger=logger).test(module, data or TinyImages(), verbose=False)
    return callback.table


def values(rows):
    return {(row.test, row.name, row.setting, row.metric): row.value for row in rows}
