# An image whose entry point is torchrun. docs/containers.md has the commands that build and run it.

# Debian or Ubuntu with Python 3.11 or newer, installed or among its packages. No CUDA: torch's wheels contain it.
ARG BASE=python:3.12-slim


FROM ${BASE} AS base
RUN command -v python3 >/dev/null \
    || { apt-get update \
        && apt-get install --yes --no-install-recommends python3 \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; } \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BASE has a Python below 3.11: choose another")'


FROM base AS build
WORKDIR /src
# pip has an environment of its own, so that the one that is copied below does not contain it.
RUN python3 -c 'import ensurepip' 2>/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends python3-venv; } \
    && python3 -m venv /opt/pip \
    && python3 -m venv --without-pip /opt/venv

# The package indexes of pip: build arguments, or the secret pip.conf. Neither is in the last stage.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

# The dependencies first, so that a change of the code does not install torch again.
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
# Every user may write there, because docker run --user may name a user that the image does not have.
RUN useradd --create-home --uid 10001 trainer \
    && install --directory --mode=1777 /work/outputs /work/data
COPY --from=build /opt/venv /opt/venv

# TORCH_HOME is the folder to which Fashion-MNIST is downloaded. Without OMP_NUM_THREADS torchrun prints a warning; the
# threads of a rank are set by num_threads=.
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
