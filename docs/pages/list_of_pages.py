"""The pages, in the order of the table of what we could reproduce."""

from docs.pages.overview import overviews
from docs.pages.results import gpu, healing, kernel_pca, out_of_distribution, smoothness, token_selection, zoo
from docs.pages.results.locater import mean, penalty
from docs.pages.results.rpc import (
    autoattack,
    classification,
    language_modeling,
    language_modeling_rates,
    scaled_attention,
    segmentation,
    sparse_part,
)

RESULTS = [
    classification.PAGE,
    sparse_part.PAGE,
    autoattack.PAGE,
    scaled_attention.PAGE,
    language_modeling.PAGE,
    language_modeling_rates.PAGE,
    segmentation.PAGE,
    out_of_distribution.PAGE,
    kernel_pca.PAGE,
    penalty.PAGE,
    mean.PAGE,
    token_selection.PAGE,
    smoothness.PAGE,
    healing.PAGE,
    zoo.PAGE,
]
PAGES = [*RESULTS, gpu.PAGE, *overviews(RESULTS)]
