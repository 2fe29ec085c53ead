import type { Adapter } from './contender';

const refuse = (): Promise<never> => Promise.reject(new Error('there is no queue here'));

/** No queue at all, for what a process can do without one. */
export const adapter: Adapter = {
  about: { title: 'no queue', package: '', settings: [], contract: [] },
  setup: refuse,
  producer: refuse,
  worker: refuse,
  remaining: refuse,
};
