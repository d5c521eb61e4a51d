"""Environments that install: `unidist setup` builds them from recipes, `unidist run` finds them.

recipes.py says what goes into each, pythons.py finds an interpreter, build.py builds, store.py knows what is ready.
"""
