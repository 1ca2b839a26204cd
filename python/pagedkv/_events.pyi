import numpy as np

EVENT: np.dtype[np.void]
