"""The small models that `hyper-parallel demo` and `hyper-parallel bench` train."""
