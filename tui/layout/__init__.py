"""Places panels in a terminal of any size, from 1 x 1 cells up. No terminal needed.

``region`` has rectangles and how panels share them, ``page`` the parts of a page, ``frame`` the
header, the tabs and the keys around it.
"""
