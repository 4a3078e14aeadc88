# Spark with the pandas backend: notebooks, tests, the demo. Build from the repository's root:
#   docker build -f docker/cpu.Dockerfile -t gpu-join:cpu .
#   docker run --rm gpu-join:cpu gpu-join demo
FROM python:3.12.12-slim-bookworm

# Spark 4.2 runs on Java 17; procps is what Spark's scripts call for `ps`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 joiner && install -d -o joiner /home/joiner/state
WORKDIR /home/joiner/gpu-join
COPY --chown=joiner . .
# the project's own extras carry its pins
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[demo,notebooks,metrics]' 'pyspark==4.2.0' 'pandas==2.3.3' 'pyarrow==26.0.1'

USER 1000
ENV PYTHONUNBUFFERED=1
EXPOSE 4040 8888
# one micro-batch through the engine
HEALTHCHECK --interval=1m --timeout=30s CMD ["gpu-join", "health"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "notebooks"]
