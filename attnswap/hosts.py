"""What a host of one's own is made of: see :func:`register_host`, and :func:`attnswap.declare_host` before it."""

from attention_modules.base import AttentionSpec as AttentionSpec
from attention_modules.hosts.base import AttentionLayer as AttentionLayer, Host as Host, Swapped as Swapped
from attention_modules.hosts.limits import Limits as Limits
from attention_modules.hosts.query import QueryPart as QueryPart, query_parts as query_parts
from attention_modules.hosts.sdpa.declared import declare_host as declare_host
from attention_modules.hosts.table import register_host as register_host
from attention_modules.hosts.weights import Rows as Rows
