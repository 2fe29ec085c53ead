/** The reason of members that were cancelled since another failed, in a batch that fails fast; `retryFailed` runs them again too. */
export const FAILED_FAST = 'another member of its batch failed';

/** Of members of a batch that was cancelled without a reason. */
export const CANCELLED = 'its batch was cancelled';
