// What BullMQ has in common on both of its backends.

const YEAR_MS = 365 * 24 * 3_600_000;

export const defaultJobOptions = { removeOnComplete: true };

/** The adding side, of a queue that is worked off and of one that is not. */
export function producerOf(queue, other) {
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
}

/** The function that BullMQ calls for each job. */
export const processorOf = (onJob) => async (job) => {
  const pending = onJob(job.data.n);
  if (pending) await pending;
};
