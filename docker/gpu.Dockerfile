# Spark with the cuDF backend, for a host with an NVIDIA card (compute capability 7.0 or newer, a CUDA 13
# driver, the NVIDIA container toolkit). Build from the repository's root:
#   docker build -f docker/gpu.Dockerfile -t gpu-join:gpu .
#   docker run --rm --gpus all gpu-join:gpu make gpu-verify PYTHON=python
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Ubuntu 24.04 has Python 3.12. git: the benchmark records the commit.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y git make openjdk-17-jre-headless procps python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 joiner
WORKDIR /home/joiner/gpu-join
COPY --chown=joiner . .
ENV PATH=/opt/venv/bin:$PATH
# the project's own extras carry its pins
# hadolint ignore=DL3013
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir '.[gpu-cu13,demo,notebooks,metrics]' \
        'pyspark==4.2.0' 'pandas==2.3.3' 'pyarrow==26.0.1' pytest hypothesis

USER 1001
ENV PYTHONUNBUFFERED=1
EXPOSE 4040 8888
# one micro-batch through the engine, on the card
HEALTHCHECK --interval=1m --timeout=30s CMD ["gpu-join", "health", "--backend", "gpu"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "notebooks"]
