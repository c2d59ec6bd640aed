"""One module for each benchmark; `benchmarks.registry` says what a module must define."""
