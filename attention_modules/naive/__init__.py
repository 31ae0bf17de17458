"""The mechanisms as their equations read, with every map in memory: what the real ones are compared with."""

from attention_modules.naive.common import (
    naive_attention as naive_attention,
    naive_logits as naive_logits,
    naive_map as naive_map,
    visibility as visibility,
    visible_count as visible_count,
)
from attention_modules.naive.keys import (
    naive_forgetting as naive_forgetting,
    naive_kde as naive_kde,
    naive_l2 as naive_l2,
    naive_mom as naive_mom,
    naive_rkde as naive_rkde,
    naive_sink as naive_sink,
    naive_sinkhorn as naive_sinkhorn,
)
from attention_modules.naive.layers import (
    naive_elliptical as naive_elliptical,
    naive_neutreno as naive_neutreno,
    naive_value_residual as naive_value_residual,
)
from attention_modules.naive.linear import (
    naive_delta as naive_delta,
    naive_gated_delta as naive_gated_delta,
    naive_gla as naive_gla,
    naive_kda as naive_kda,
    naive_linear as naive_linear,
    naive_recurrence as naive_recurrence,
    naive_retention as naive_retention,
)
from attention_modules.naive.maps import (
    naive_dam as naive_dam,
    naive_entmax as naive_entmax,
    naive_hard as naive_hard,
    naive_position_bias as naive_position_bias,
    naive_sigmoid as naive_sigmoid,
    naive_talking_heads as naive_talking_heads,
)
from attention_modules.naive.outputs import (
    naive_differential as naive_differential,
    naive_gated as naive_gated,
    naive_twicing as naive_twicing,
)
from attention_modules.naive.past import (
    naive_hedgehog as naive_hedgehog,
    naive_performer as naive_performer,
    naive_window as naive_window,
)
from attention_modules.naive.pursuit import (
    naive_rpc as naive_rpc,
    naive_scaled as naive_scaled,
    soft as soft,
)
from attention_modules.naive.queries import (
    naive_qk_norm as naive_qk_norm,
    naive_ssa as naive_ssa,
    naive_ssmax as naive_ssmax,
)
