"""Looking inside a decoder: what its heads mix, and what is left without some of its layers or heads.

``mixing`` is the foundation; every other module is one experiment, which returns a `Table` and draws a figure.
"""
