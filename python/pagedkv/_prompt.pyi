# For the other modules only: nothing of it is visible from Python.
