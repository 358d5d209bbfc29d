"""Attention for the layers of other libraries, under the names that these pass. Importing it imports none of them."""

from ejkernel.integrations.equinox_layers import equinox_attention as equinox_attention
from ejkernel.integrations.flax_layers import flax_attention as flax_attention
