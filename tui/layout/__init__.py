"""Places panels in a terminal of any size, from 1 x 1 cells up. No terminal needed.

``region`` has rectangles, ``overview`` the layout of the first page.
"""
