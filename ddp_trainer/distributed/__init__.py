"""The process group and the parts around it: environment, seeds, failure monitor and
graceful stop.
"""
