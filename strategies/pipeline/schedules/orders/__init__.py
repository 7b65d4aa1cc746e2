"""The schedules that boltmesh has, by family.

Each module registers its schedules when it is imported, and ``registry`` imports every module of
this folder: a new schedule is one module here.
"""
