"""One file a method, one signature: method(engine, state, request, options) -> Outcome."""
