"""The pages, in the order of the table of what we could reproduce."""

from docs.pages.overview import overviews
from docs.pages.results import (
    gpu,
    healing,
    kernel_pca,
    locater,
    locater_mean,
    out_of_distribution,
    rpc_classification,
    rpc_language_modeling,
    rpc_language_modeling_rates,
    rpc_segmentation,
    rpc_sparse_part,
    smoothness,
    token_selection,
    zoo,
)

RESULTS = [
    rpc_classification.PAGE,
    rpc_sparse_part.PAGE,
    rpc_language_modeling.PAGE,
    rpc_language_modeling_rates.PAGE,
    rpc_segmentation.PAGE,
    out_of_distribution.PAGE,
    kernel_pca.PAGE,
    locater.PAGE,
    locater_mean.PAGE,
    token_selection.PAGE,
    smoothness.PAGE,
    healing.PAGE,
    zoo.PAGE,
]
PAGES = [*RESULTS, gpu.PAGE, *overviews(RESULTS)]
