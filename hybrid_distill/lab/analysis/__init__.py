"""Looking inside a decoder: what its heads mix, and what is left without some of its layers or heads.

``experiment`` is what experiments share, ``mixing`` and ``patterns`` are what ``maps`` is made of; ``removal`` and
``hybrids`` hold the others.
"""
