import threads, { Worker } from 'node:worker_threads';

const started = new Set<Worker>();

// Leasehold's beat has a thread of its own, and shows it to nobody: this must be loaded before Leasehold is.
threads.Worker = class extends Worker {
  constructor(...args: ConstructorParameters<typeof Worker>) {
    super(...args);
    started.add(this);
    this.once('exit', () => started.delete(this));
  }
};

/** Ends every thread of this process but the first, in the midst of whatever it does. */
export function endThreads(): void {
  for (const thread of started) void thread.terminate();
}
