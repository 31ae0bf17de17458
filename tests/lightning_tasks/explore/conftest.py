"""The small BERT that analyses are tested on."""

from tests.lightning_tasks.analyses.conftest import bert as bert
