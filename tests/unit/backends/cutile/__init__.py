from importlib.util import find_spec

IS_INSTALLED = find_spec("cuda") is not None and find_spec("cuda.tile") is not None
