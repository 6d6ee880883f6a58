"""Records of runs as one HTML page, with the figures as PNG and the numbers of each as CSV.

    runs.find(paths) -> Run .. -> methods.from_runs(runs) -> ReportedMethod .. -> figures.make -> pages.write

A figure is made of rows, and the rows are its CSV; one that the records have no numbers for says so instead.
"""
