"""The command line: `dlo`. The one package that may start every other part; nobody imports it."""
