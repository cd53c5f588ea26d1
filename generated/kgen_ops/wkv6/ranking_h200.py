"""How configs of `wkv6` rank on h200: by the same model as those of `wkv5`.

Written by kgen emit --learn-rankings; do not edit.
"""

# Version of the interface between this file and the runtime.
FORMAT = 3

SAME_AS = "wkv5"
