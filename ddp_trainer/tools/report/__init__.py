"""One self-contained HTML file about run directories: curves, step times, evaluations, configs and
versions.
"""
