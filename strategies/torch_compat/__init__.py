"""The private names of torch that the strategies need, each with why, in one room.

Others import from here; what is kept where is the business of these files.
"""
