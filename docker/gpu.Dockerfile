# Spark with the cuDF backend, for a host with an NVIDIA card (compute capability 7.5 or newer, a CUDA 13
# driver, the NVIDIA container toolkit). Build from the repository's root:
#   docker build -f docker/gpu.Dockerfile -t gpu-join:gpu .
#   docker run --rm --gpus all gpu-join:gpu make gpu-verify PYTHON=python
# NVIDIA's plugin for Spark is in it, and off. SPARK_CONF_DIR=/opt/rapids/conf turns it on, as docker/compose.gpu.yaml does.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Ubuntu 24.04 has Python 3.12. git: the benchmark records the commit.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y git make openjdk-17-jre-headless procps python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# the plugin, with shims for Spark 4.2.0, from Maven Central (docs/rapids.md); Docker takes no file with another checksum
ADD --checksum=sha256:3fb3b105cd61c869f7d164e1d6b5b2dab1e5b8f1e3c7f2e8c0e0e515a13886e1 --chmod=644 \
    https://repo1.maven.org/maven2/com/nvidia/rapids-4-spark_2.13/26.08.1/rapids-4-spark_2.13-26.08.1-cuda13.jar \
    /opt/rapids/rapids-4-spark_2.13-26.08.1-cuda13.jar

# the jars of Kafka and Postgres, as the tests of services have them; Delta and Iceberg by packages, as nobody has tried
# Delta's jar beside the plugin
ADD --checksum=sha256:64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/spark/spark-sql-kafka-0-10_2.13/4.2.0/spark-sql-kafka-0-10_2.13-4.2.0.jar \
    /opt/jars/
ADD --checksum=sha256:f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/spark/spark-token-provider-kafka-0-10_2.13/4.0.0/spark-token-provider-kafka-0-10_2.13-4.0.0.jar \
    /opt/jars/
ADD --checksum=sha256:7568b998572d256f0b7bc0afdc1b7a2588b8b08415c62ce314c864a6851ae9d9 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/kafka/kafka-clients/3.9.1/kafka-clients-3.9.1.jar \
    /opt/jars/
ADD --checksum=sha256:6d3bd18df8410f3e31b031aca582cc109342358a62a2759ebd0c4cdf30d06f8b --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/commons/commons-pool2/2.12.0/commons-pool2-2.12.0.jar \
    /opt/jars/
ADD --checksum=sha256:188976721ead8e8627eb6d8389d500dccc0c9bebd885268a3047180274a6031e --chmod=644 \
    https://repo1.maven.org/maven2/org/postgresql/postgresql/42.7.4/postgresql-42.7.4.jar \
    /opt/jars/

RUN useradd --create-home --uid 1001 joiner && install -d -o joiner /home/joiner/state
WORKDIR /home/joiner/gpu-join
COPY --chown=joiner . .
ENV PATH=/opt/venv/bin:$PATH
# the project's own extras carry its pins
# hadolint ignore=DL3013
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir '.[gpu-cu13,demo,notebooks,metrics,delta,iceberg,kafka]' \
        'pyspark==4.2.0' 'pandas==2.3.3' 'pyarrow==26.0.1' pytest hypothesis \
    && mv /opt/jars/*.jar "$(python -c 'import pyspark; print(pyspark.__path__[0])')/jars/"

# the plugin's settings beside state servers on one card, as gpu_ops says them
RUN mkdir /opt/rapids/conf \
    && python -c 'import glob, gpu_ops.spark as s; \
[print(k, v) for k, v in s.rapids_conf(jar=glob.glob("/opt/rapids/*.jar")[0]).items()]' \
        > /opt/rapids/conf/spark-defaults.conf

USER 1001
ENV PYTHONUNBUFFERED=1
EXPOSE 4040 8888
# one micro-batch through the engine, on the card
HEALTHCHECK --interval=1m --timeout=30s CMD ["gpu-join", "health", "--backend", "gpu"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "notebooks"]
