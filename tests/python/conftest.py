"""Makes this folder importable from every test: helpers are imported as ``folder.module``.

Each folder is a package (an empty ``__init__.py``), so that files of one name in two folders, such
as conftest.py, are two modules.
"""
