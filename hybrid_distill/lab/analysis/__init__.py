"""Analysis of a decoder: what its heads mix, and what it can do without layers or heads."""
