"""Launched with ``tune run``, never imported; this file makes ``recipes/X.py`` resolve to this folder."""
