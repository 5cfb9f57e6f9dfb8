raise RuntimeError("half installed")
