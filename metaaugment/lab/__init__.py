"""The laboratory around the library: the program, data sets, experiments, compared systems, searches and reports.

Needs more packages than the library: pip install 'metaaugment[lab]'. Nothing outside this folder imports it, but for
the name `metaaugment.dataset`.
"""
