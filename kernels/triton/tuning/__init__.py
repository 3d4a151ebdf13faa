"""Tiles by device and shape: what was measured on this machine, what ships for a card by reasoning, and who asks for them.

`book.TileBook` is where products and attention get a tile from. Nothing here imports triton before something is measured.
"""
