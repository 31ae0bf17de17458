"""What an attention layer does, measured: spectra, entropy, local Lipschitz constants, margins, kernel PCA."""

from attention_modules.analysis import *  # noqa: F403 the names that it lists, and no other
from attention_modules.analysis import __all__ as __all__
