"""The last import of the process from which ranks are forked: their garbage collections skip what
it has imported.

The command line does the same after it has imported torch.
"""

import gc

gc.freeze()
