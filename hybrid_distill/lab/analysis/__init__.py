"""Looking inside a decoder: what its heads mix, and what is left without some of its layers or heads."""
