# An image whose entry point is torchrun. docs/containers.md has the commands that build and run it.

# Debian or Ubuntu with Python 3.11 or newer, installed or among its packages. No CUDA: torch's wheels contain it.
ARG BASE=python:3.12-slim


FROM ${BASE} AS base
RUN command -v python3 >/dev/null \
    || { apt-get update \
        && apt-get install --yes --no-install-recommends python3 \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; } \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BASE has a Python below 3.11: choose another")'


FROM base AS pip
WORKDIR /src
# pip has an environment of its own. The last stage borrows it, and so contains neither pip nor a copy of what is there.
RUN python3 -c 'import ensurepip' 2>/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends python3-venv; } \
    && python3 -m venv /opt/pip
# The package indexes of pip: build arguments, or the secret pip.conf. Neither is in the last stage.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN printf '[global]\n%s\n%s\n' "${PIP_INDEX_URL:+index-url = $PIP_INDEX_URL}" \
        "${PIP_EXTRA_INDEX_URL:+extra-index-url = $PIP_EXTRA_INDEX_URL}" >/opt/pip/pip.conf
COPY pyproject.toml constraints.txt ./
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        >requirements.txt


FROM pip AS wheel
COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    PIP_CONFIG_FILE=/opt/pip/pip.conf PIP_CONSTRAINT=constraints.txt \
    /opt/pip/bin/pip wheel --disable-pip-version-check --no-deps --wheel-dir /wheel .


FROM base
LABEL org.opencontainers.image.title="ddp_trainer" org.opencontainers.image.licenses="MIT"
# Every user may write there, because docker run --user may name a user that the image does not have.
RUN useradd --create-home --uid 10001 trainer \
    && install --directory --mode=1777 /work/outputs /work/data
# The dependencies first, so that a change of the code does not install torch again.
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip --mount=type=bind,from=pip,source=/src,target=/src \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/venv \
    && PIP_CONFIG_FILE=/opt/pip/pip.conf /opt/pip/bin/pip --python /opt/venv/bin/python install --no-cache-dir \
        --disable-pip-version-check --constraint /src/constraints.txt --requirement /src/requirements.txt
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-cache-dir --disable-pip-version-check --no-deps /wheel/*.whl

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
