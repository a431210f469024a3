# TEMPORARY
import numpy as np
FLOAT32_PARITY=1e-5
BFLOAT16_ATTENTION=2e-2
BFLOAT16_GRADIENT=5e-2
def max_relative_error(a,b):
    a,b=np.asarray(a,np.float64),np.asarray(b,np.float64)
    return np.abs(a-b).max()/max(np.abs(b).max(),1e-30)
