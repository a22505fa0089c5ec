"""How well it is gone: measures of a model beside a retrained one."""
