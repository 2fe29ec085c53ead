import { Queue, Worker } from 'bullmq';
import { Redis } from 'ioredis';

const QUEUE = 'bench';
const NOBODYS_QUEUE = 'nobody';
const YEAR_MS = 365 * 24 * 3_600_000;
/** Ended jobs are deleted, as its guide advises for throughput. */
const defaultJobOptions = { removeOnComplete: true };

const CONCURRENCY = { throughput: 200, async: 200, large: 50, latency: 50 };

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
    settings: ['concurrency 200 (50 for payload100k and latency), removeOnComplete', 'added by add and addBulk'],
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
    const add = (to, payloads, opts) => to.addBulk(payloads.map((data) => ({ name: 'bench', data, opts })));
    return {
      one: (payload) => queue.add('bench', payload),
      bulk: (payloads) => add(queue, payloads),
      head: async (kind, payloads) => {
        if (kind === 'paused') await other.pause();
        await (kind === 'future' ? add(queue, payloads, { delay: YEAR_MS }) : add(other, payloads));
      },
      close: () => Promise.all([queue.close(), other.close()]),
    };
  },

  async worker(url, { mode }, onJob) {
    const worker = new Worker(
      QUEUE,
      async (job) => {
        const pending = onJob(job.data.n);
        if (pending) await pending;
      },
      { connection: connectionOf(url), concurrency: CONCURRENCY[mode] },
    );
    await worker.waitUntilReady();
    return { stop: () => worker.close(true) };
  },

  async remaining(url) {
    counter ??= new Queue(QUEUE, { connection: connectionOf(url) });
    const { wait, active, prioritized } = await counter.getJobCounts('wait', 'active', 'prioritized');
    return wait + active + prioritized;
  },
};
