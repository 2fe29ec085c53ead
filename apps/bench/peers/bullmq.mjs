import { Queue, Worker } from 'bullmq';
import { Redis } from 'ioredis';
import { defaultJobOptions, processorOf, producerOf } from './bull.mjs';

const QUEUE = 'bench';
const NOBODYS_QUEUE = 'nobody';
/** Ended jobs are deleted, as its guide advises for throughput. */

const CONCURRENCY = { throughput: 400, async: 200, large: 50, latency: 50 };

const connectionOf = (url) => ({
  host: new URL(url).hostname,
  port: Number(new URL(url).port),
  maxRetriesPerRequest: null,
});

let counter;

export const adapter = {
  about: {
    title: 'BullMQ on Redis',
    package: 'bullmq',
    settings: [
      'concurrency 400 (200 for work5, 50 for payload100k and latency), removeOnComplete',
      'added by add and addBulk',
    ],
    contract: [
      'Redis without append-only file: a crash of Redis loses the jobs.',
      'A job is deleted when it has completed: no history.',
      'A stalled job may run twice; its lock is checked when it completes.',
    ],
    recovery: {
      seconds: 60,
      source: 'lockDuration 30 s, then the next check for stalled jobs, every stalledInterval 30 s: 30 to 60 s',
    },
  },

  async setup(url) {
    const redis = new Redis(connectionOf(url));
    await redis.flushall();
    await redis.quit();
  },

  async producer(url) {
    const connection = connectionOf(url);
    const queue = new Queue(QUEUE, { connection, defaultJobOptions });
    const other = new Queue(NOBODYS_QUEUE, { connection, defaultJobOptions });
    return producerOf(queue, other);
  },

  async worker(url, { mode }, onJob) {
    const worker = new Worker(QUEUE, processorOf(onJob), {
      connection: connectionOf(url),
      concurrency: CONCURRENCY[mode],
    });
    await worker.waitUntilReady();
    return { stop: () => worker.close(true) };
  },

  async remaining(url) {
    counter ??= new Queue(QUEUE, { connection: connectionOf(url) });
    const { wait, active, prioritized } = await counter.getJobCounts('wait', 'active', 'prioritized');
    return wait + active + prioritized;
  },
};
