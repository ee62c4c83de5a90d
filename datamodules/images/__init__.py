"""Sets of images: find samples in folders, tables and tars, check, frame and decode their files, inspect them.

Closed: it imports nothing else of Retouch except `foundation.errors` and `foundation.files`.
"""
