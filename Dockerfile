# An image whose entry is torchrun. docs/containers.md has the lines that build and start it.

# Debian or Ubuntu, with Python 3.11 or newer inside or among its packages. It needs no CUDA: torch brings its own.
ARG BASE=python:3.12-slim


FROM ${BASE} AS base
RUN command -v python3 >/dev/null \
    || { apt-get update \
        && apt-get install --yes --no-install-recommends python3 \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; } \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BASE has a Python below 3.11: choose another")'


FROM base AS build
WORKDIR /src
# pip lives apart, so that what is copied below holds what runs and nothing that installs.
RUN python3 -c 'import ensurepip' 2>/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends python3-venv; } \
    && python3 -m venv /opt/pip \
    && python3 -m venv --without-pip /opt/venv

# Where pip looks, by argument, or by the secret pip.conf if it is nobody's business; neither gets into the last stage.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

# The dependencies first: a change of the code does not install torch again.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        >requirements.txt \
    && /opt/pip/bin/pip --python /opt/venv/bin/python install --requirement requirements.txt

COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-deps .


FROM base
LABEL org.opencontainers.image.title="ddp_trainer" org.opencontainers.image.licenses="MIT"
# Anyone may write there: docker run --user may name a user whom the image does not know.
RUN useradd --create-home --uid 10001 trainer \
    && install --directory --mode=1777 /work/outputs /work/data
COPY --from=build /opt/venv /opt/venv

# TORCH_HOME is where Fashion-MNIST is downloaded to. OMP_NUM_THREADS is for torchrun, which else announces that it
# sets it: a rank takes num_threads=.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    TORCH_HOME=/work/data \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
VOLUME /work/outputs
USER 10001:10001
ENTRYPOINT ["torchrun"]
CMD ["--help"]
