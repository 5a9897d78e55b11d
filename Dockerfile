# drivetrain with CUDA: docker build -t drivetrain .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" -u "$(id -u)" -e HOME=/tmp drivetrain train precision=bf16
# torch's wheels bring CUDA's libraries; the base gives the driver's place in the container. Another base: --build-arg BASE=…
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
FROM ${BASE}

# The compiler is for compile=inductor, which builds the wrappers of its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The locked packages come first: a change of the code then leaves this layer as it is.
COPY requirements /build/requirements
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --no-build-isolation --require-hashes -r /build/requirements/tools.txt \
    && /venv/bin/uv pip install --no-cache --python /venv/bin/python --no-build-isolation --require-hashes -r /build/requirements/run.txt

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
COPY conf /build/conf
COPY recipes /build/recipes
RUN /venv/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation /build \
    && useradd --create-home --uid 10001 trainer \
    && install -d -o trainer /work

ENV PATH=/venv/bin:$PATH
USER 10001
WORKDIR /work
ENTRYPOINT ["drivetrain"]
CMD ["help"]
