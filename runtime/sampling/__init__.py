from dspark.kernels.compile_cache import make_cache_optional

make_cache_optional()
