"""The operators: arguments, schemas, checks of calls, layouts of weights."""
