"""Half an hour of faults is for `make test-faults`: this folder is collected only when it is named."""


def pytest_ignore_collect(collection_path, config):
    return None if any("faults" in str(argument) for argument in config.invocation_params.args) else True
