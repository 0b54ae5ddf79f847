"""How rowferry is measured: what ``rowferry bench``, ``rowferry plan`` and the programs in ``benchmarks/`` share.

Everything goes through the public API. ``suite.py`` is the list of what the command measures.
"""
