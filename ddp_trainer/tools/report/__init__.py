"""One self-contained HTML file about run directories: curves, evaluations, configs and versions."""
