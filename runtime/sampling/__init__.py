from dspark.kernels.compile_cache import prepare_cache

prepare_cache()
