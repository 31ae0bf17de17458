"""How a model does under attack, corruption and a shift of its data; `docs/robustness.md` says what each figure means.

AutoAttack is its authors' library `pyautoattack`; the corruptions are those of `imagecorruptions-imaug` (2026). The
other attacks are our own few lines, tested against closed forms: torchattacks (2023) pins requests 2.25, foolbox was
last released in March 2024, and the Adversarial Robustness Toolbox (2025) goes through numpy at every step and has no
SPSA; cleverhans 4.0 (2021) needs nose and TensorFlow Probability (looked up in November 2026).
"""

from lightning_tasks.robustness.attacks.auto import autoattack as autoattack, run_autoattack as run_autoattack
from lightning_tasks.robustness.attacks.carlini_wagner import carlini_wagner as carlini_wagner
from lightning_tasks.robustness.attacks.gradient import (
    fgsm as fgsm,
    input_gradient_norms as input_gradient_norms,
    pgd as pgd,
)
from lightning_tasks.robustness.attacks.hop_skip_jump import hop_skip_jump as hop_skip_jump
from lightning_tasks.robustness.attacks.released import (
    released_fgsm as released_fgsm,
    released_noise as released_noise,
    released_pgd as released_pgd,
    released_spsa as released_spsa,
)
from lightning_tasks.robustness.attacks.sparse_l1 import (
    released_sparse_l1_descent as released_sparse_l1_descent,
    sparse_l1_descent as sparse_l1_descent,
)
from lightning_tasks.robustness.attacks.spsa import spsa as spsa
from lightning_tasks.robustness.attacks.square import square as square
from lightning_tasks.robustness.attacks.transfer import transfer as transfer
